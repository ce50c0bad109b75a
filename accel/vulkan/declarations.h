// Made by accel/vulkan/declare.py from vulkan_core.h, header version 239.
// Copyright 2015-2022 The Khronos Group Inc.
// SPDX-License-Identifier: Apache-2.0
#define VK_SUCCESS 0
#define VK_NOT_READY 1
#define VK_TIMEOUT 2
#define VK_EVENT_SET 3
#define VK_EVENT_RESET 4
#define VK_INCOMPLETE 5
#define VK_ERROR_OUT_OF_HOST_MEMORY -1
#define VK_ERROR_OUT_OF_DEVICE_MEMORY -2
#define VK_ERROR_INITIALIZATION_FAILED -3
#define VK_ERROR_DEVICE_LOST -4
#define VK_ERROR_MEMORY_MAP_FAILED -5
#define VK_ERROR_LAYER_NOT_PRESENT -6
#define VK_ERROR_EXTENSION_NOT_PRESENT -7
#define VK_ERROR_FEATURE_NOT_PRESENT -8
#define VK_ERROR_INCOMPATIBLE_DRIVER -9
#define VK_ERROR_TOO_MANY_OBJECTS -10
#define VK_ERROR_FORMAT_NOT_SUPPORTED -11
#define VK_ERROR_FRAGMENTED_POOL -12
#define VK_ERROR_UNKNOWN -13
#define VK_ERROR_OUT_OF_POOL_MEMORY -1000069000
#define VK_ERROR_INVALID_EXTERNAL_HANDLE -1000072003
#define VK_ERROR_FRAGMENTATION -1000161000
#define VK_ERROR_INVALID_OPAQUE_CAPTURE_ADDRESS -1000257000
#define VK_PIPELINE_COMPILE_REQUIRED 1000297000
#define VK_ERROR_SURFACE_LOST_KHR -1000000000
#define VK_ERROR_NATIVE_WINDOW_IN_USE_KHR -1000000001
#define VK_SUBOPTIMAL_KHR 1000001003
#define VK_ERROR_OUT_OF_DATE_KHR -1000001004
#define VK_ERROR_INCOMPATIBLE_DISPLAY_KHR -1000003001
#define VK_ERROR_VALIDATION_FAILED_EXT -1000011001
#define VK_ERROR_INVALID_SHADER_NV -1000012000
#define VK_ERROR_IMAGE_USAGE_NOT_SUPPORTED_KHR -1000023000
#define VK_ERROR_VIDEO_PICTURE_LAYOUT_NOT_SUPPORTED_KHR -1000023001
#define VK_ERROR_VIDEO_PROFILE_OPERATION_NOT_SUPPORTED_KHR -1000023002
#define VK_ERROR_VIDEO_PROFILE_FORMAT_NOT_SUPPORTED_KHR -1000023003
#define VK_ERROR_VIDEO_PROFILE_CODEC_NOT_SUPPORTED_KHR -1000023004
#define VK_ERROR_VIDEO_STD_VERSION_NOT_SUPPORTED_KHR -1000023005
#define VK_ERROR_INVALID_DRM_FORMAT_MODIFIER_PLANE_LAYOUT_EXT -1000158000
#define VK_ERROR_NOT_PERMITTED_KHR -1000174001
#define VK_ERROR_FULL_SCREEN_EXCLUSIVE_MODE_LOST_EXT -1000255000
#define VK_THREAD_IDLE_KHR 1000268000
#define VK_THREAD_DONE_KHR 1000268001
#define VK_OPERATION_DEFERRED_KHR 1000268002
#define VK_OPERATION_NOT_DEFERRED_KHR 1000268003
#define VK_ERROR_COMPRESSION_EXHAUSTED_EXT -1000338000
#define VK_PHYSICAL_DEVICE_TYPE_OTHER 0
#define VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU 1
#define VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU 2
#define VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU 3
#define VK_PHYSICAL_DEVICE_TYPE_CPU 4
#define VK_SEMAPHORE_TYPE_BINARY 0
#define VK_SEMAPHORE_TYPE_TIMELINE 1
#define VK_DRIVER_ID_AMD_PROPRIETARY 1
#define VK_DRIVER_ID_AMD_OPEN_SOURCE 2
#define VK_DRIVER_ID_MESA_RADV 3
#define VK_DRIVER_ID_NVIDIA_PROPRIETARY 4
#define VK_DRIVER_ID_INTEL_PROPRIETARY_WINDOWS 5
#define VK_DRIVER_ID_INTEL_OPEN_SOURCE_MESA 6
#define VK_DRIVER_ID_IMAGINATION_PROPRIETARY 7
#define VK_DRIVER_ID_QUALCOMM_PROPRIETARY 8
#define VK_DRIVER_ID_ARM_PROPRIETARY 9
#define VK_DRIVER_ID_GOOGLE_SWIFTSHADER 10
#define VK_DRIVER_ID_GGP_PROPRIETARY 11
#define VK_DRIVER_ID_BROADCOM_PROPRIETARY 12
#define VK_DRIVER_ID_MESA_LLVMPIPE 13
#define VK_DRIVER_ID_MOLTENVK 14
#define VK_DRIVER_ID_COREAVI_PROPRIETARY 15
#define VK_DRIVER_ID_JUICE_PROPRIETARY 16
#define VK_DRIVER_ID_VERISILICON_PROPRIETARY 17
#define VK_DRIVER_ID_MESA_TURNIP 18
#define VK_DRIVER_ID_MESA_V3DV 19
#define VK_DRIVER_ID_MESA_PANVK 20
#define VK_DRIVER_ID_SAMSUNG_PROPRIETARY 21
#define VK_DRIVER_ID_MESA_VENUS 22
#define VK_DRIVER_ID_MESA_DOZEN 23
#define VK_DRIVER_ID_MESA_NVK 24
#define VK_DRIVER_ID_IMAGINATION_OPEN_SOURCE_MESA 25
#define VK_PIPELINE_BIND_POINT_GRAPHICS 0
#define VK_PIPELINE_BIND_POINT_COMPUTE 1
#define VK_PIPELINE_BIND_POINT_RAY_TRACING_KHR 1000165000
#define VK_PIPELINE_BIND_POINT_SUBPASS_SHADING_HUAWEI 1000369003
#define VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT 0x00000001
#define VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT 0x00000002
#define VK_MEMORY_PROPERTY_HOST_COHERENT_BIT 0x00000004
#define VK_MEMORY_PROPERTY_HOST_CACHED_BIT 0x00000008
#define VK_MEMORY_PROPERTY_LAZILY_ALLOCATED_BIT 0x00000010
#define VK_MEMORY_PROPERTY_PROTECTED_BIT 0x00000020
#define VK_MEMORY_PROPERTY_DEVICE_COHERENT_BIT_AMD 0x00000040
#define VK_MEMORY_PROPERTY_DEVICE_UNCACHED_BIT_AMD 0x00000080
#define VK_MEMORY_PROPERTY_RDMA_CAPABLE_BIT_NV 0x00000100
#define VK_MEMORY_HEAP_DEVICE_LOCAL_BIT 0x00000001
#define VK_MEMORY_HEAP_MULTI_INSTANCE_BIT 0x00000002
#define VK_MEMORY_ALLOCATE_DEVICE_MASK_BIT 0x00000001
#define VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT 0x00000002
#define VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_CAPTURE_REPLAY_BIT 0x00000004
#define VK_BUFFER_USAGE_TRANSFER_SRC_BIT 0x00000001
#define VK_BUFFER_USAGE_TRANSFER_DST_BIT 0x00000002
#define VK_BUFFER_USAGE_UNIFORM_TEXEL_BUFFER_BIT 0x00000004
#define VK_BUFFER_USAGE_STORAGE_TEXEL_BUFFER_BIT 0x00000008
#define VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT 0x00000010
#define VK_BUFFER_USAGE_STORAGE_BUFFER_BIT 0x00000020
#define VK_BUFFER_USAGE_INDEX_BUFFER_BIT 0x00000040
#define VK_BUFFER_USAGE_VERTEX_BUFFER_BIT 0x00000080
#define VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT 0x00000100
#define VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT 0x00020000
#define VK_BUFFER_USAGE_VIDEO_DECODE_SRC_BIT_KHR 0x00002000
#define VK_BUFFER_USAGE_VIDEO_DECODE_DST_BIT_KHR 0x00004000
#define VK_BUFFER_USAGE_TRANSFORM_FEEDBACK_BUFFER_BIT_EXT 0x00000800
#define VK_BUFFER_USAGE_TRANSFORM_FEEDBACK_COUNTER_BUFFER_BIT_EXT 0x00001000
#define VK_BUFFER_USAGE_CONDITIONAL_RENDERING_BIT_EXT 0x00000200
#define VK_BUFFER_USAGE_ACCELERATION_STRUCTURE_BUILD_INPUT_READ_ONLY_BIT_KHR 0x00080000
#define VK_BUFFER_USAGE_ACCELERATION_STRUCTURE_STORAGE_BIT_KHR 0x00100000
#define VK_BUFFER_USAGE_SHADER_BINDING_TABLE_BIT_KHR 0x00000400
#define VK_BUFFER_USAGE_VIDEO_ENCODE_DST_BIT_KHR 0x00008000
#define VK_BUFFER_USAGE_VIDEO_ENCODE_SRC_BIT_KHR 0x00010000
#define VK_BUFFER_USAGE_SAMPLER_DESCRIPTOR_BUFFER_BIT_EXT 0x00200000
#define VK_BUFFER_USAGE_RESOURCE_DESCRIPTOR_BUFFER_BIT_EXT 0x00400000
#define VK_BUFFER_USAGE_PUSH_DESCRIPTORS_DESCRIPTOR_BUFFER_BIT_EXT 0x04000000
#define VK_BUFFER_USAGE_MICROMAP_BUILD_INPUT_READ_ONLY_BIT_EXT 0x00800000
#define VK_BUFFER_USAGE_MICROMAP_STORAGE_BIT_EXT 0x01000000
#define VK_QUEUE_GRAPHICS_BIT 0x00000001
#define VK_QUEUE_COMPUTE_BIT 0x00000002
#define VK_QUEUE_TRANSFER_BIT 0x00000004
#define VK_QUEUE_SPARSE_BINDING_BIT 0x00000008
#define VK_QUEUE_PROTECTED_BIT 0x00000010
#define VK_QUEUE_VIDEO_DECODE_BIT_KHR 0x00000020
#define VK_QUEUE_VIDEO_ENCODE_BIT_KHR 0x00000040
#define VK_QUEUE_OPTICAL_FLOW_BIT_NV 0x00000100
#define VK_ACCESS_INDIRECT_COMMAND_READ_BIT 0x00000001
#define VK_ACCESS_INDEX_READ_BIT 0x00000002
#define VK_ACCESS_VERTEX_ATTRIBUTE_READ_BIT 0x00000004
#define VK_ACCESS_UNIFORM_READ_BIT 0x00000008
#define VK_ACCESS_INPUT_ATTACHMENT_READ_BIT 0x00000010
#define VK_ACCESS_SHADER_READ_BIT 0x00000020
#define VK_ACCESS_SHADER_WRITE_BIT 0x00000040
#define VK_ACCESS_COLOR_ATTACHMENT_READ_BIT 0x00000080
#define VK_ACCESS_COLOR_ATTACHMENT_WRITE_BIT 0x00000100
#define VK_ACCESS_DEPTH_STENCIL_ATTACHMENT_READ_BIT 0x00000200
#define VK_ACCESS_DEPTH_STENCIL_ATTACHMENT_WRITE_BIT 0x00000400
#define VK_ACCESS_TRANSFER_READ_BIT 0x00000800
#define VK_ACCESS_TRANSFER_WRITE_BIT 0x00001000
#define VK_ACCESS_HOST_READ_BIT 0x00002000
#define VK_ACCESS_HOST_WRITE_BIT 0x00004000
#define VK_ACCESS_MEMORY_READ_BIT 0x00008000
#define VK_ACCESS_MEMORY_WRITE_BIT 0x00010000
#define VK_ACCESS_NONE 0
#define VK_ACCESS_TRANSFORM_FEEDBACK_WRITE_BIT_EXT 0x02000000
#define VK_ACCESS_TRANSFORM_FEEDBACK_COUNTER_READ_BIT_EXT 0x04000000
#define VK_ACCESS_TRANSFORM_FEEDBACK_COUNTER_WRITE_BIT_EXT 0x08000000
#define VK_ACCESS_CONDITIONAL_RENDERING_READ_BIT_EXT 0x00100000
#define VK_ACCESS_COLOR_ATTACHMENT_READ_NONCOHERENT_BIT_EXT 0x00080000
#define VK_ACCESS_ACCELERATION_STRUCTURE_READ_BIT_KHR 0x00200000
#define VK_ACCESS_ACCELERATION_STRUCTURE_WRITE_BIT_KHR 0x00400000
#define VK_ACCESS_FRAGMENT_DENSITY_MAP_READ_BIT_EXT 0x01000000
#define VK_ACCESS_FRAGMENT_SHADING_RATE_ATTACHMENT_READ_BIT_KHR 0x00800000
#define VK_ACCESS_COMMAND_PREPROCESS_READ_BIT_NV 0x00020000
#define VK_ACCESS_COMMAND_PREPROCESS_WRITE_BIT_NV 0x00040000
#define VK_PIPELINE_STAGE_TOP_OF_PIPE_BIT 0x00000001
#define VK_PIPELINE_STAGE_DRAW_INDIRECT_BIT 0x00000002
#define VK_PIPELINE_STAGE_VERTEX_INPUT_BIT 0x00000004
#define VK_PIPELINE_STAGE_VERTEX_SHADER_BIT 0x00000008
#define VK_PIPELINE_STAGE_TESSELLATION_CONTROL_SHADER_BIT 0x00000010
#define VK_PIPELINE_STAGE_TESSELLATION_EVALUATION_SHADER_BIT 0x00000020
#define VK_PIPELINE_STAGE_GEOMETRY_SHADER_BIT 0x00000040
#define VK_PIPELINE_STAGE_FRAGMENT_SHADER_BIT 0x00000080
#define VK_PIPELINE_STAGE_EARLY_FRAGMENT_TESTS_BIT 0x00000100
#define VK_PIPELINE_STAGE_LATE_FRAGMENT_TESTS_BIT 0x00000200
#define VK_PIPELINE_STAGE_COLOR_ATTACHMENT_OUTPUT_BIT 0x00000400
#define VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT 0x00000800
#define VK_PIPELINE_STAGE_TRANSFER_BIT 0x00001000
#define VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT 0x00002000
#define VK_PIPELINE_STAGE_HOST_BIT 0x00004000
#define VK_PIPELINE_STAGE_ALL_GRAPHICS_BIT 0x00008000
#define VK_PIPELINE_STAGE_ALL_COMMANDS_BIT 0x00010000
#define VK_PIPELINE_STAGE_NONE 0
#define VK_PIPELINE_STAGE_TRANSFORM_FEEDBACK_BIT_EXT 0x01000000
#define VK_PIPELINE_STAGE_CONDITIONAL_RENDERING_BIT_EXT 0x00040000
#define VK_PIPELINE_STAGE_ACCELERATION_STRUCTURE_BUILD_BIT_KHR 0x02000000
#define VK_PIPELINE_STAGE_RAY_TRACING_SHADER_BIT_KHR 0x00200000
#define VK_PIPELINE_STAGE_FRAGMENT_DENSITY_PROCESS_BIT_EXT 0x00800000
#define VK_PIPELINE_STAGE_FRAGMENT_SHADING_RATE_ATTACHMENT_BIT_KHR 0x00400000
#define VK_PIPELINE_STAGE_COMMAND_PREPROCESS_BIT_NV 0x00020000
#define VK_PIPELINE_STAGE_TASK_SHADER_BIT_EXT 0x00080000
#define VK_PIPELINE_STAGE_MESH_SHADER_BIT_EXT 0x00100000
#define VK_SHADER_STAGE_VERTEX_BIT 0x00000001
#define VK_SHADER_STAGE_TESSELLATION_CONTROL_BIT 0x00000002
#define VK_SHADER_STAGE_TESSELLATION_EVALUATION_BIT 0x00000004
#define VK_SHADER_STAGE_GEOMETRY_BIT 0x00000008
#define VK_SHADER_STAGE_FRAGMENT_BIT 0x00000010
#define VK_SHADER_STAGE_COMPUTE_BIT 0x00000020
#define VK_SHADER_STAGE_ALL_GRAPHICS 0x0000001F
#define VK_SHADER_STAGE_ALL 0x7FFFFFFF
#define VK_SHADER_STAGE_RAYGEN_BIT_KHR 0x00000100
#define VK_SHADER_STAGE_ANY_HIT_BIT_KHR 0x00000200
#define VK_SHADER_STAGE_CLOSEST_HIT_BIT_KHR 0x00000400
#define VK_SHADER_STAGE_MISS_BIT_KHR 0x00000800
#define VK_SHADER_STAGE_INTERSECTION_BIT_KHR 0x00001000
#define VK_SHADER_STAGE_CALLABLE_BIT_KHR 0x00002000
#define VK_SHADER_STAGE_TASK_BIT_EXT 0x00000040
#define VK_SHADER_STAGE_MESH_BIT_EXT 0x00000080
#define VK_SHADER_STAGE_SUBPASS_SHADING_BIT_HUAWEI 0x00004000
#define VK_SHADER_STAGE_CLUSTER_CULLING_BIT_HUAWEI 0x00080000
#define VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT 0x00000001
#define VK_COMMAND_BUFFER_USAGE_RENDER_PASS_CONTINUE_BIT 0x00000002
#define VK_COMMAND_BUFFER_USAGE_SIMULTANEOUS_USE_BIT 0x00000004
#define STRUCTURE_TYPE_VkApplicationInfo 0
#define STRUCTURE_TYPE_VkInstanceCreateInfo 1
#define STRUCTURE_TYPE_VkPhysicalDeviceProperties2 1000059001
#define STRUCTURE_TYPE_VkPhysicalDeviceFeatures2 1000059000
#define STRUCTURE_TYPE_VkPhysicalDeviceMemoryProperties2 1000059006
#define STRUCTURE_TYPE_VkDeviceQueueCreateInfo 2
#define STRUCTURE_TYPE_VkDeviceCreateInfo 3
#define STRUCTURE_TYPE_VkBufferCreateInfo 12
#define STRUCTURE_TYPE_VkBufferDeviceAddressInfo 1000244001
#define STRUCTURE_TYPE_VkMemoryAllocateInfo 5
#define STRUCTURE_TYPE_VkShaderModuleCreateInfo 16
#define STRUCTURE_TYPE_VkPipelineLayoutCreateInfo 30
#define STRUCTURE_TYPE_VkPipelineCacheCreateInfo 17
#define STRUCTURE_TYPE_VkPipelineShaderStageCreateInfo 18
#define STRUCTURE_TYPE_VkComputePipelineCreateInfo 29
#define STRUCTURE_TYPE_VkCommandPoolCreateInfo 39
#define STRUCTURE_TYPE_VkCommandBufferAllocateInfo 40
#define STRUCTURE_TYPE_VkCommandBufferInheritanceInfo 41
#define STRUCTURE_TYPE_VkCommandBufferBeginInfo 42
#define STRUCTURE_TYPE_VkMemoryBarrier 46
#define STRUCTURE_TYPE_VkBufferMemoryBarrier 44
#define STRUCTURE_TYPE_VkImageMemoryBarrier 45
#define STRUCTURE_TYPE_VkSemaphoreCreateInfo 9
#define STRUCTURE_TYPE_VkSemaphoreWaitInfo 1000207004
#define STRUCTURE_TYPE_VkSubmitInfo 4
#define STRUCTURE_TYPE_VkPhysicalDeviceVulkan11Features 49
#define STRUCTURE_TYPE_VkPhysicalDeviceVulkan12Features 51
#define STRUCTURE_TYPE_VkPhysicalDeviceVulkan11Properties 50
#define STRUCTURE_TYPE_VkPhysicalDeviceVulkan12Properties 52
#define STRUCTURE_TYPE_VkPhysicalDeviceMaintenance3Properties 1000168000
#define STRUCTURE_TYPE_VkPhysicalDeviceMaintenance4Properties 1000413001
#define STRUCTURE_TYPE_VkPhysicalDeviceMemoryBudgetPropertiesEXT 1000237000
#define STRUCTURE_TYPE_VkPhysicalDeviceShaderIntegerDotProductFeatures 1000280000
#define STRUCTURE_TYPE_VkSemaphoreTypeCreateInfo 1000207002
#define STRUCTURE_TYPE_VkTimelineSemaphoreSubmitInfo 1000207003
#define STRUCTURE_TYPE_VkMemoryAllocateFlagsInfo 1000060000
typedef int32_t VkResult;
typedef int32_t VkStructureType;
typedef uint32_t VkFlags;
typedef VkFlags VkInstanceCreateFlags;
typedef struct VkApplicationInfo {
    VkStructureType    sType;
    const void*        pNext;
    const char*        pApplicationName;
    uint32_t           applicationVersion;
    const char*        pEngineName;
    uint32_t           engineVersion;
    uint32_t           apiVersion;
} VkApplicationInfo;
typedef struct VkInstanceCreateInfo {
    VkStructureType             sType;
    const void*                 pNext;
    VkInstanceCreateFlags       flags;
    const VkApplicationInfo*    pApplicationInfo;
    uint32_t                    enabledLayerCount;
    const char* const*          ppEnabledLayerNames;
    uint32_t                    enabledExtensionCount;
    const char* const*          ppEnabledExtensionNames;
} VkInstanceCreateInfo;
typedef void (*PFN_vkAllocationFunction)(void);
typedef void (*PFN_vkReallocationFunction)(void);
typedef void (*PFN_vkFreeFunction)(void);
typedef void (*PFN_vkInternalAllocationNotification)(void);
typedef void (*PFN_vkInternalFreeNotification)(void);
typedef struct VkAllocationCallbacks {
    void*                                   pUserData;
    PFN_vkAllocationFunction                pfnAllocation;
    PFN_vkReallocationFunction              pfnReallocation;
    PFN_vkFreeFunction                      pfnFree;
    PFN_vkInternalAllocationNotification    pfnInternalAllocation;
    PFN_vkInternalFreeNotification          pfnInternalFree;
} VkAllocationCallbacks;
typedef struct VkInstance_T *VkInstance;
typedef struct VkPhysicalDevice_T *VkPhysicalDevice;
typedef struct VkExtensionProperties {
    char        extensionName[256];
    uint32_t    specVersion;
} VkExtensionProperties;
typedef int32_t VkPhysicalDeviceType;
typedef uint64_t VkDeviceSize;
typedef VkFlags VkSampleCountFlags;
typedef uint32_t VkBool32;
typedef struct VkPhysicalDeviceLimits {
    uint32_t              maxImageDimension1D;
    uint32_t              maxImageDimension2D;
    uint32_t              maxImageDimension3D;
    uint32_t              maxImageDimensionCube;
    uint32_t              maxImageArrayLayers;
    uint32_t              maxTexelBufferElements;
    uint32_t              maxUniformBufferRange;
    uint32_t              maxStorageBufferRange;
    uint32_t              maxPushConstantsSize;
    uint32_t              maxMemoryAllocationCount;
    uint32_t              maxSamplerAllocationCount;
    VkDeviceSize          bufferImageGranularity;
    VkDeviceSize          sparseAddressSpaceSize;
    uint32_t              maxBoundDescriptorSets;
    uint32_t              maxPerStageDescriptorSamplers;
    uint32_t              maxPerStageDescriptorUniformBuffers;
    uint32_t              maxPerStageDescriptorStorageBuffers;
    uint32_t              maxPerStageDescriptorSampledImages;
    uint32_t              maxPerStageDescriptorStorageImages;
    uint32_t              maxPerStageDescriptorInputAttachments;
    uint32_t              maxPerStageResources;
    uint32_t              maxDescriptorSetSamplers;
    uint32_t              maxDescriptorSetUniformBuffers;
    uint32_t              maxDescriptorSetUniformBuffersDynamic;
    uint32_t              maxDescriptorSetStorageBuffers;
    uint32_t              maxDescriptorSetStorageBuffersDynamic;
    uint32_t              maxDescriptorSetSampledImages;
    uint32_t              maxDescriptorSetStorageImages;
    uint32_t              maxDescriptorSetInputAttachments;
    uint32_t              maxVertexInputAttributes;
    uint32_t              maxVertexInputBindings;
    uint32_t              maxVertexInputAttributeOffset;
    uint32_t              maxVertexInputBindingStride;
    uint32_t              maxVertexOutputComponents;
    uint32_t              maxTessellationGenerationLevel;
    uint32_t              maxTessellationPatchSize;
    uint32_t              maxTessellationControlPerVertexInputComponents;
    uint32_t              maxTessellationControlPerVertexOutputComponents;
    uint32_t              maxTessellationControlPerPatchOutputComponents;
    uint32_t              maxTessellationControlTotalOutputComponents;
    uint32_t              maxTessellationEvaluationInputComponents;
    uint32_t              maxTessellationEvaluationOutputComponents;
    uint32_t              maxGeometryShaderInvocations;
    uint32_t              maxGeometryInputComponents;
    uint32_t              maxGeometryOutputComponents;
    uint32_t              maxGeometryOutputVertices;
    uint32_t              maxGeometryTotalOutputComponents;
    uint32_t              maxFragmentInputComponents;
    uint32_t              maxFragmentOutputAttachments;
    uint32_t              maxFragmentDualSrcAttachments;
    uint32_t              maxFragmentCombinedOutputResources;
    uint32_t              maxComputeSharedMemorySize;
    uint32_t              maxComputeWorkGroupCount[3];
    uint32_t              maxComputeWorkGroupInvocations;
    uint32_t              maxComputeWorkGroupSize[3];
    uint32_t              subPixelPrecisionBits;
    uint32_t              subTexelPrecisionBits;
    uint32_t              mipmapPrecisionBits;
    uint32_t              maxDrawIndexedIndexValue;
    uint32_t              maxDrawIndirectCount;
    float                 maxSamplerLodBias;
    float                 maxSamplerAnisotropy;
    uint32_t              maxViewports;
    uint32_t              maxViewportDimensions[2];
    float                 viewportBoundsRange[2];
    uint32_t              viewportSubPixelBits;
    size_t                minMemoryMapAlignment;
    VkDeviceSize          minTexelBufferOffsetAlignment;
    VkDeviceSize          minUniformBufferOffsetAlignment;
    VkDeviceSize          minStorageBufferOffsetAlignment;
    int32_t               minTexelOffset;
    uint32_t              maxTexelOffset;
    int32_t               minTexelGatherOffset;
    uint32_t              maxTexelGatherOffset;
    float                 minInterpolationOffset;
    float                 maxInterpolationOffset;
    uint32_t              subPixelInterpolationOffsetBits;
    uint32_t              maxFramebufferWidth;
    uint32_t              maxFramebufferHeight;
    uint32_t              maxFramebufferLayers;
    VkSampleCountFlags    framebufferColorSampleCounts;
    VkSampleCountFlags    framebufferDepthSampleCounts;
    VkSampleCountFlags    framebufferStencilSampleCounts;
    VkSampleCountFlags    framebufferNoAttachmentsSampleCounts;
    uint32_t              maxColorAttachments;
    VkSampleCountFlags    sampledImageColorSampleCounts;
    VkSampleCountFlags    sampledImageIntegerSampleCounts;
    VkSampleCountFlags    sampledImageDepthSampleCounts;
    VkSampleCountFlags    sampledImageStencilSampleCounts;
    VkSampleCountFlags    storageImageSampleCounts;
    uint32_t              maxSampleMaskWords;
    VkBool32              timestampComputeAndGraphics;
    float                 timestampPeriod;
    uint32_t              maxClipDistances;
    uint32_t              maxCullDistances;
    uint32_t              maxCombinedClipAndCullDistances;
    uint32_t              discreteQueuePriorities;
    float                 pointSizeRange[2];
    float                 lineWidthRange[2];
    float                 pointSizeGranularity;
    float                 lineWidthGranularity;
    VkBool32              strictLines;
    VkBool32              standardSampleLocations;
    VkDeviceSize          optimalBufferCopyOffsetAlignment;
    VkDeviceSize          optimalBufferCopyRowPitchAlignment;
    VkDeviceSize          nonCoherentAtomSize;
} VkPhysicalDeviceLimits;
typedef struct VkPhysicalDeviceSparseProperties {
    VkBool32    residencyStandard2DBlockShape;
    VkBool32    residencyStandard2DMultisampleBlockShape;
    VkBool32    residencyStandard3DBlockShape;
    VkBool32    residencyAlignedMipSize;
    VkBool32    residencyNonResidentStrict;
} VkPhysicalDeviceSparseProperties;
typedef struct VkPhysicalDeviceProperties {
    uint32_t                            apiVersion;
    uint32_t                            driverVersion;
    uint32_t                            vendorID;
    uint32_t                            deviceID;
    VkPhysicalDeviceType                deviceType;
    char                                deviceName[256];
    uint8_t                             pipelineCacheUUID[16];
    VkPhysicalDeviceLimits              limits;
    VkPhysicalDeviceSparseProperties    sparseProperties;
} VkPhysicalDeviceProperties;
typedef struct VkPhysicalDeviceProperties2 {
    VkStructureType               sType;
    void*                         pNext;
    VkPhysicalDeviceProperties    properties;
} VkPhysicalDeviceProperties2;
typedef struct VkPhysicalDeviceFeatures {
    VkBool32    robustBufferAccess;
    VkBool32    fullDrawIndexUint32;
    VkBool32    imageCubeArray;
    VkBool32    independentBlend;
    VkBool32    geometryShader;
    VkBool32    tessellationShader;
    VkBool32    sampleRateShading;
    VkBool32    dualSrcBlend;
    VkBool32    logicOp;
    VkBool32    multiDrawIndirect;
    VkBool32    drawIndirectFirstInstance;
    VkBool32    depthClamp;
    VkBool32    depthBiasClamp;
    VkBool32    fillModeNonSolid;
    VkBool32    depthBounds;
    VkBool32    wideLines;
    VkBool32    largePoints;
    VkBool32    alphaToOne;
    VkBool32    multiViewport;
    VkBool32    samplerAnisotropy;
    VkBool32    textureCompressionETC2;
    VkBool32    textureCompressionASTC_LDR;
    VkBool32    textureCompressionBC;
    VkBool32    occlusionQueryPrecise;
    VkBool32    pipelineStatisticsQuery;
    VkBool32    vertexPipelineStoresAndAtomics;
    VkBool32    fragmentStoresAndAtomics;
    VkBool32    shaderTessellationAndGeometryPointSize;
    VkBool32    shaderImageGatherExtended;
    VkBool32    shaderStorageImageExtendedFormats;
    VkBool32    shaderStorageImageMultisample;
    VkBool32    shaderStorageImageReadWithoutFormat;
    VkBool32    shaderStorageImageWriteWithoutFormat;
    VkBool32    shaderUniformBufferArrayDynamicIndexing;
    VkBool32    shaderSampledImageArrayDynamicIndexing;
    VkBool32    shaderStorageBufferArrayDynamicIndexing;
    VkBool32    shaderStorageImageArrayDynamicIndexing;
    VkBool32    shaderClipDistance;
    VkBool32    shaderCullDistance;
    VkBool32    shaderFloat64;
    VkBool32    shaderInt64;
    VkBool32    shaderInt16;
    VkBool32    shaderResourceResidency;
    VkBool32    shaderResourceMinLod;
    VkBool32    sparseBinding;
    VkBool32    sparseResidencyBuffer;
    VkBool32    sparseResidencyImage2D;
    VkBool32    sparseResidencyImage3D;
    VkBool32    sparseResidency2Samples;
    VkBool32    sparseResidency4Samples;
    VkBool32    sparseResidency8Samples;
    VkBool32    sparseResidency16Samples;
    VkBool32    sparseResidencyAliased;
    VkBool32    variableMultisampleRate;
    VkBool32    inheritedQueries;
} VkPhysicalDeviceFeatures;
typedef struct VkPhysicalDeviceFeatures2 {
    VkStructureType             sType;
    void*                       pNext;
    VkPhysicalDeviceFeatures    features;
} VkPhysicalDeviceFeatures2;
typedef VkFlags VkQueueFlags;
typedef struct VkExtent3D {
    uint32_t    width;
    uint32_t    height;
    uint32_t    depth;
} VkExtent3D;
typedef struct VkQueueFamilyProperties {
    VkQueueFlags    queueFlags;
    uint32_t        queueCount;
    uint32_t        timestampValidBits;
    VkExtent3D      minImageTransferGranularity;
} VkQueueFamilyProperties;
typedef VkFlags VkMemoryPropertyFlags;
typedef struct VkMemoryType {
    VkMemoryPropertyFlags    propertyFlags;
    uint32_t                 heapIndex;
} VkMemoryType;
typedef VkFlags VkMemoryHeapFlags;
typedef struct VkMemoryHeap {
    VkDeviceSize         size;
    VkMemoryHeapFlags    flags;
} VkMemoryHeap;
typedef struct VkPhysicalDeviceMemoryProperties {
    uint32_t        memoryTypeCount;
    VkMemoryType    memoryTypes[32];
    uint32_t        memoryHeapCount;
    VkMemoryHeap    memoryHeaps[16];
} VkPhysicalDeviceMemoryProperties;
typedef struct VkPhysicalDeviceMemoryProperties2 {
    VkStructureType                     sType;
    void*                               pNext;
    VkPhysicalDeviceMemoryProperties    memoryProperties;
} VkPhysicalDeviceMemoryProperties2;
typedef VkFlags VkDeviceCreateFlags;
typedef VkFlags VkDeviceQueueCreateFlags;
typedef struct VkDeviceQueueCreateInfo {
    VkStructureType             sType;
    const void*                 pNext;
    VkDeviceQueueCreateFlags    flags;
    uint32_t                    queueFamilyIndex;
    uint32_t                    queueCount;
    const float*                pQueuePriorities;
} VkDeviceQueueCreateInfo;
typedef struct VkDeviceCreateInfo {
    VkStructureType                    sType;
    const void*                        pNext;
    VkDeviceCreateFlags                flags;
    uint32_t                           queueCreateInfoCount;
    const VkDeviceQueueCreateInfo*     pQueueCreateInfos;
    uint32_t                           enabledLayerCount;
    const char* const*                 ppEnabledLayerNames;
    uint32_t                           enabledExtensionCount;
    const char* const*                 ppEnabledExtensionNames;
    const VkPhysicalDeviceFeatures*    pEnabledFeatures;
} VkDeviceCreateInfo;
typedef struct VkDevice_T *VkDevice;
typedef struct VkQueue_T *VkQueue;
typedef VkFlags VkBufferCreateFlags;
typedef VkFlags VkBufferUsageFlags;
typedef int32_t VkSharingMode;
typedef struct VkBufferCreateInfo {
    VkStructureType        sType;
    const void*            pNext;
    VkBufferCreateFlags    flags;
    VkDeviceSize           size;
    VkBufferUsageFlags     usage;
    VkSharingMode          sharingMode;
    uint32_t               queueFamilyIndexCount;
    const uint32_t*        pQueueFamilyIndices;
} VkBufferCreateInfo;
typedef struct VkBuffer_T *VkBuffer;
typedef struct VkMemoryRequirements {
    VkDeviceSize    size;
    VkDeviceSize    alignment;
    uint32_t        memoryTypeBits;
} VkMemoryRequirements;
typedef uint64_t VkDeviceAddress;
typedef struct VkBufferDeviceAddressInfo {
    VkStructureType    sType;
    const void*        pNext;
    VkBuffer           buffer;
} VkBufferDeviceAddressInfo;
typedef struct VkMemoryAllocateInfo {
    VkStructureType    sType;
    const void*        pNext;
    VkDeviceSize       allocationSize;
    uint32_t           memoryTypeIndex;
} VkMemoryAllocateInfo;
typedef struct VkDeviceMemory_T *VkDeviceMemory;
typedef VkFlags VkMemoryMapFlags;
typedef VkFlags VkShaderModuleCreateFlags;
typedef struct VkShaderModuleCreateInfo {
    VkStructureType              sType;
    const void*                  pNext;
    VkShaderModuleCreateFlags    flags;
    size_t                       codeSize;
    const uint32_t*              pCode;
} VkShaderModuleCreateInfo;
typedef struct VkShaderModule_T *VkShaderModule;
typedef VkFlags VkPipelineLayoutCreateFlags;
typedef struct VkDescriptorSetLayout_T *VkDescriptorSetLayout;
typedef VkFlags VkShaderStageFlags;
typedef struct VkPushConstantRange {
    VkShaderStageFlags    stageFlags;
    uint32_t              offset;
    uint32_t              size;
} VkPushConstantRange;
typedef struct VkPipelineLayoutCreateInfo {
    VkStructureType                 sType;
    const void*                     pNext;
    VkPipelineLayoutCreateFlags     flags;
    uint32_t                        setLayoutCount;
    const VkDescriptorSetLayout*    pSetLayouts;
    uint32_t                        pushConstantRangeCount;
    const VkPushConstantRange*      pPushConstantRanges;
} VkPipelineLayoutCreateInfo;
typedef struct VkPipelineLayout_T *VkPipelineLayout;
typedef VkFlags VkPipelineCacheCreateFlags;
typedef struct VkPipelineCacheCreateInfo {
    VkStructureType               sType;
    const void*                   pNext;
    VkPipelineCacheCreateFlags    flags;
    size_t                        initialDataSize;
    const void*                   pInitialData;
} VkPipelineCacheCreateInfo;
typedef struct VkPipelineCache_T *VkPipelineCache;
typedef VkFlags VkPipelineCreateFlags;
typedef VkFlags VkPipelineShaderStageCreateFlags;
typedef int32_t VkShaderStageFlagBits;
typedef struct VkSpecializationMapEntry {
    uint32_t    constantID;
    uint32_t    offset;
    size_t      size;
} VkSpecializationMapEntry;
typedef struct VkSpecializationInfo {
    uint32_t                           mapEntryCount;
    const VkSpecializationMapEntry*    pMapEntries;
    size_t                             dataSize;
    const void*                        pData;
} VkSpecializationInfo;
typedef struct VkPipelineShaderStageCreateInfo {
    VkStructureType                     sType;
    const void*                         pNext;
    VkPipelineShaderStageCreateFlags    flags;
    VkShaderStageFlagBits               stage;
    VkShaderModule                      module;
    const char*                         pName;
    const VkSpecializationInfo*         pSpecializationInfo;
} VkPipelineShaderStageCreateInfo;
typedef struct VkPipeline_T *VkPipeline;
typedef struct VkComputePipelineCreateInfo {
    VkStructureType                    sType;
    const void*                        pNext;
    VkPipelineCreateFlags              flags;
    VkPipelineShaderStageCreateInfo    stage;
    VkPipelineLayout                   layout;
    VkPipeline                         basePipelineHandle;
    int32_t                            basePipelineIndex;
} VkComputePipelineCreateInfo;
typedef VkFlags VkCommandPoolCreateFlags;
typedef struct VkCommandPoolCreateInfo {
    VkStructureType             sType;
    const void*                 pNext;
    VkCommandPoolCreateFlags    flags;
    uint32_t                    queueFamilyIndex;
} VkCommandPoolCreateInfo;
typedef struct VkCommandPool_T *VkCommandPool;
typedef int32_t VkCommandBufferLevel;
typedef struct VkCommandBufferAllocateInfo {
    VkStructureType         sType;
    const void*             pNext;
    VkCommandPool           commandPool;
    VkCommandBufferLevel    level;
    uint32_t                commandBufferCount;
} VkCommandBufferAllocateInfo;
typedef struct VkCommandBuffer_T *VkCommandBuffer;
typedef VkFlags VkCommandBufferUsageFlags;
typedef struct VkRenderPass_T *VkRenderPass;
typedef struct VkFramebuffer_T *VkFramebuffer;
typedef VkFlags VkQueryControlFlags;
typedef VkFlags VkQueryPipelineStatisticFlags;
typedef struct VkCommandBufferInheritanceInfo {
    VkStructureType                  sType;
    const void*                      pNext;
    VkRenderPass                     renderPass;
    uint32_t                         subpass;
    VkFramebuffer                    framebuffer;
    VkBool32                         occlusionQueryEnable;
    VkQueryControlFlags              queryFlags;
    VkQueryPipelineStatisticFlags    pipelineStatistics;
} VkCommandBufferInheritanceInfo;
typedef struct VkCommandBufferBeginInfo {
    VkStructureType                          sType;
    const void*                              pNext;
    VkCommandBufferUsageFlags                flags;
    const VkCommandBufferInheritanceInfo*    pInheritanceInfo;
} VkCommandBufferBeginInfo;
typedef int32_t VkPipelineBindPoint;
typedef VkFlags VkPipelineStageFlags;
typedef VkFlags VkDependencyFlags;
typedef VkFlags VkAccessFlags;
typedef struct VkMemoryBarrier {
    VkStructureType    sType;
    const void*        pNext;
    VkAccessFlags      srcAccessMask;
    VkAccessFlags      dstAccessMask;
} VkMemoryBarrier;
typedef struct VkBufferMemoryBarrier {
    VkStructureType    sType;
    const void*        pNext;
    VkAccessFlags      srcAccessMask;
    VkAccessFlags      dstAccessMask;
    uint32_t           srcQueueFamilyIndex;
    uint32_t           dstQueueFamilyIndex;
    VkBuffer           buffer;
    VkDeviceSize       offset;
    VkDeviceSize       size;
} VkBufferMemoryBarrier;
typedef int32_t VkImageLayout;
typedef struct VkImage_T *VkImage;
typedef VkFlags VkImageAspectFlags;
typedef struct VkImageSubresourceRange {
    VkImageAspectFlags    aspectMask;
    uint32_t              baseMipLevel;
    uint32_t              levelCount;
    uint32_t              baseArrayLayer;
    uint32_t              layerCount;
} VkImageSubresourceRange;
typedef struct VkImageMemoryBarrier {
    VkStructureType            sType;
    const void*                pNext;
    VkAccessFlags              srcAccessMask;
    VkAccessFlags              dstAccessMask;
    VkImageLayout              oldLayout;
    VkImageLayout              newLayout;
    uint32_t                   srcQueueFamilyIndex;
    uint32_t                   dstQueueFamilyIndex;
    VkImage                    image;
    VkImageSubresourceRange    subresourceRange;
} VkImageMemoryBarrier;
typedef struct VkBufferCopy {
    VkDeviceSize    srcOffset;
    VkDeviceSize    dstOffset;
    VkDeviceSize    size;
} VkBufferCopy;
typedef VkFlags VkSemaphoreCreateFlags;
typedef struct VkSemaphoreCreateInfo {
    VkStructureType           sType;
    const void*               pNext;
    VkSemaphoreCreateFlags    flags;
} VkSemaphoreCreateInfo;
typedef struct VkSemaphore_T *VkSemaphore;
typedef VkFlags VkSemaphoreWaitFlags;
typedef struct VkSemaphoreWaitInfo {
    VkStructureType         sType;
    const void*             pNext;
    VkSemaphoreWaitFlags    flags;
    uint32_t                semaphoreCount;
    const VkSemaphore*      pSemaphores;
    const uint64_t*         pValues;
} VkSemaphoreWaitInfo;
typedef struct VkSubmitInfo {
    VkStructureType                sType;
    const void*                    pNext;
    uint32_t                       waitSemaphoreCount;
    const VkSemaphore*             pWaitSemaphores;
    const VkPipelineStageFlags*    pWaitDstStageMask;
    uint32_t                       commandBufferCount;
    const VkCommandBuffer*         pCommandBuffers;
    uint32_t                       signalSemaphoreCount;
    const VkSemaphore*             pSignalSemaphores;
} VkSubmitInfo;
typedef struct VkFence_T *VkFence;
typedef struct VkPhysicalDeviceVulkan11Features {
    VkStructureType    sType;
    void*              pNext;
    VkBool32           storageBuffer16BitAccess;
    VkBool32           uniformAndStorageBuffer16BitAccess;
    VkBool32           storagePushConstant16;
    VkBool32           storageInputOutput16;
    VkBool32           multiview;
    VkBool32           multiviewGeometryShader;
    VkBool32           multiviewTessellationShader;
    VkBool32           variablePointersStorageBuffer;
    VkBool32           variablePointers;
    VkBool32           protectedMemory;
    VkBool32           samplerYcbcrConversion;
    VkBool32           shaderDrawParameters;
} VkPhysicalDeviceVulkan11Features;
typedef struct VkPhysicalDeviceVulkan12Features {
    VkStructureType    sType;
    void*              pNext;
    VkBool32           samplerMirrorClampToEdge;
    VkBool32           drawIndirectCount;
    VkBool32           storageBuffer8BitAccess;
    VkBool32           uniformAndStorageBuffer8BitAccess;
    VkBool32           storagePushConstant8;
    VkBool32           shaderBufferInt64Atomics;
    VkBool32           shaderSharedInt64Atomics;
    VkBool32           shaderFloat16;
    VkBool32           shaderInt8;
    VkBool32           descriptorIndexing;
    VkBool32           shaderInputAttachmentArrayDynamicIndexing;
    VkBool32           shaderUniformTexelBufferArrayDynamicIndexing;
    VkBool32           shaderStorageTexelBufferArrayDynamicIndexing;
    VkBool32           shaderUniformBufferArrayNonUniformIndexing;
    VkBool32           shaderSampledImageArrayNonUniformIndexing;
    VkBool32           shaderStorageBufferArrayNonUniformIndexing;
    VkBool32           shaderStorageImageArrayNonUniformIndexing;
    VkBool32           shaderInputAttachmentArrayNonUniformIndexing;
    VkBool32           shaderUniformTexelBufferArrayNonUniformIndexing;
    VkBool32           shaderStorageTexelBufferArrayNonUniformIndexing;
    VkBool32           descriptorBindingUniformBufferUpdateAfterBind;
    VkBool32           descriptorBindingSampledImageUpdateAfterBind;
    VkBool32           descriptorBindingStorageImageUpdateAfterBind;
    VkBool32           descriptorBindingStorageBufferUpdateAfterBind;
    VkBool32           descriptorBindingUniformTexelBufferUpdateAfterBind;
    VkBool32           descriptorBindingStorageTexelBufferUpdateAfterBind;
    VkBool32           descriptorBindingUpdateUnusedWhilePending;
    VkBool32           descriptorBindingPartiallyBound;
    VkBool32           descriptorBindingVariableDescriptorCount;
    VkBool32           runtimeDescriptorArray;
    VkBool32           samplerFilterMinmax;
    VkBool32           scalarBlockLayout;
    VkBool32           imagelessFramebuffer;
    VkBool32           uniformBufferStandardLayout;
    VkBool32           shaderSubgroupExtendedTypes;
    VkBool32           separateDepthStencilLayouts;
    VkBool32           hostQueryReset;
    VkBool32           timelineSemaphore;
    VkBool32           bufferDeviceAddress;
    VkBool32           bufferDeviceAddressCaptureReplay;
    VkBool32           bufferDeviceAddressMultiDevice;
    VkBool32           vulkanMemoryModel;
    VkBool32           vulkanMemoryModelDeviceScope;
    VkBool32           vulkanMemoryModelAvailabilityVisibilityChains;
    VkBool32           shaderOutputViewportIndex;
    VkBool32           shaderOutputLayer;
    VkBool32           subgroupBroadcastDynamicId;
} VkPhysicalDeviceVulkan12Features;
typedef VkFlags VkSubgroupFeatureFlags;
typedef int32_t VkPointClippingBehavior;
typedef struct VkPhysicalDeviceVulkan11Properties {
    VkStructureType            sType;
    void*                      pNext;
    uint8_t                    deviceUUID[16];
    uint8_t                    driverUUID[16];
    uint8_t                    deviceLUID[8];
    uint32_t                   deviceNodeMask;
    VkBool32                   deviceLUIDValid;
    uint32_t                   subgroupSize;
    VkShaderStageFlags         subgroupSupportedStages;
    VkSubgroupFeatureFlags     subgroupSupportedOperations;
    VkBool32                   subgroupQuadOperationsInAllStages;
    VkPointClippingBehavior    pointClippingBehavior;
    uint32_t                   maxMultiviewViewCount;
    uint32_t                   maxMultiviewInstanceIndex;
    VkBool32                   protectedNoFault;
    uint32_t                   maxPerSetDescriptors;
    VkDeviceSize               maxMemoryAllocationSize;
} VkPhysicalDeviceVulkan11Properties;
typedef int32_t VkDriverId;
typedef struct VkConformanceVersion {
    uint8_t    major;
    uint8_t    minor;
    uint8_t    subminor;
    uint8_t    patch;
} VkConformanceVersion;
typedef int32_t VkShaderFloatControlsIndependence;
typedef VkFlags VkResolveModeFlags;
typedef struct VkPhysicalDeviceVulkan12Properties {
    VkStructureType                      sType;
    void*                                pNext;
    VkDriverId                           driverID;
    char                                 driverName[256];
    char                                 driverInfo[256];
    VkConformanceVersion                 conformanceVersion;
    VkShaderFloatControlsIndependence    denormBehaviorIndependence;
    VkShaderFloatControlsIndependence    roundingModeIndependence;
    VkBool32                             shaderSignedZeroInfNanPreserveFloat16;
    VkBool32                             shaderSignedZeroInfNanPreserveFloat32;
    VkBool32                             shaderSignedZeroInfNanPreserveFloat64;
    VkBool32                             shaderDenormPreserveFloat16;
    VkBool32                             shaderDenormPreserveFloat32;
    VkBool32                             shaderDenormPreserveFloat64;
    VkBool32                             shaderDenormFlushToZeroFloat16;
    VkBool32                             shaderDenormFlushToZeroFloat32;
    VkBool32                             shaderDenormFlushToZeroFloat64;
    VkBool32                             shaderRoundingModeRTEFloat16;
    VkBool32                             shaderRoundingModeRTEFloat32;
    VkBool32                             shaderRoundingModeRTEFloat64;
    VkBool32                             shaderRoundingModeRTZFloat16;
    VkBool32                             shaderRoundingModeRTZFloat32;
    VkBool32                             shaderRoundingModeRTZFloat64;
    uint32_t                             maxUpdateAfterBindDescriptorsInAllPools;
    VkBool32                             shaderUniformBufferArrayNonUniformIndexingNative;
    VkBool32                             shaderSampledImageArrayNonUniformIndexingNative;
    VkBool32                             shaderStorageBufferArrayNonUniformIndexingNative;
    VkBool32                             shaderStorageImageArrayNonUniformIndexingNative;
    VkBool32                             shaderInputAttachmentArrayNonUniformIndexingNative;
    VkBool32                             robustBufferAccessUpdateAfterBind;
    VkBool32                             quadDivergentImplicitLod;
    uint32_t                             maxPerStageDescriptorUpdateAfterBindSamplers;
    uint32_t                             maxPerStageDescriptorUpdateAfterBindUniformBuffers;
    uint32_t                             maxPerStageDescriptorUpdateAfterBindStorageBuffers;
    uint32_t                             maxPerStageDescriptorUpdateAfterBindSampledImages;
    uint32_t                             maxPerStageDescriptorUpdateAfterBindStorageImages;
    uint32_t                             maxPerStageDescriptorUpdateAfterBindInputAttachments;
    uint32_t                             maxPerStageUpdateAfterBindResources;
    uint32_t                             maxDescriptorSetUpdateAfterBindSamplers;
    uint32_t                             maxDescriptorSetUpdateAfterBindUniformBuffers;
    uint32_t                             maxDescriptorSetUpdateAfterBindUniformBuffersDynamic;
    uint32_t                             maxDescriptorSetUpdateAfterBindStorageBuffers;
    uint32_t                             maxDescriptorSetUpdateAfterBindStorageBuffersDynamic;
    uint32_t                             maxDescriptorSetUpdateAfterBindSampledImages;
    uint32_t                             maxDescriptorSetUpdateAfterBindStorageImages;
    uint32_t                             maxDescriptorSetUpdateAfterBindInputAttachments;
    VkResolveModeFlags                   supportedDepthResolveModes;
    VkResolveModeFlags                   supportedStencilResolveModes;
    VkBool32                             independentResolveNone;
    VkBool32                             independentResolve;
    VkBool32                             filterMinmaxSingleComponentFormats;
    VkBool32                             filterMinmaxImageComponentMapping;
    uint64_t                             maxTimelineSemaphoreValueDifference;
    VkSampleCountFlags                   framebufferIntegerColorSampleCounts;
} VkPhysicalDeviceVulkan12Properties;
typedef struct VkPhysicalDeviceMaintenance3Properties {
    VkStructureType    sType;
    void*              pNext;
    uint32_t           maxPerSetDescriptors;
    VkDeviceSize       maxMemoryAllocationSize;
} VkPhysicalDeviceMaintenance3Properties;
typedef struct VkPhysicalDeviceMaintenance4Properties {
    VkStructureType    sType;
    void*              pNext;
    VkDeviceSize       maxBufferSize;
} VkPhysicalDeviceMaintenance4Properties;
typedef struct VkPhysicalDeviceMemoryBudgetPropertiesEXT {
    VkStructureType    sType;
    void*              pNext;
    VkDeviceSize       heapBudget[16];
    VkDeviceSize       heapUsage[16];
} VkPhysicalDeviceMemoryBudgetPropertiesEXT;
typedef struct VkPhysicalDeviceShaderIntegerDotProductFeatures {
    VkStructureType    sType;
    void*              pNext;
    VkBool32           shaderIntegerDotProduct;
} VkPhysicalDeviceShaderIntegerDotProductFeatures;
typedef int32_t VkSemaphoreType;
typedef struct VkSemaphoreTypeCreateInfo {
    VkStructureType    sType;
    const void*        pNext;
    VkSemaphoreType    semaphoreType;
    uint64_t           initialValue;
} VkSemaphoreTypeCreateInfo;
typedef struct VkTimelineSemaphoreSubmitInfo {
    VkStructureType    sType;
    const void*        pNext;
    uint32_t           waitSemaphoreValueCount;
    const uint64_t*    pWaitSemaphoreValues;
    uint32_t           signalSemaphoreValueCount;
    const uint64_t*    pSignalSemaphoreValues;
} VkTimelineSemaphoreSubmitInfo;
typedef VkFlags VkMemoryAllocateFlags;
typedef struct VkMemoryAllocateFlagsInfo {
    VkStructureType          sType;
    const void*              pNext;
    VkMemoryAllocateFlags    flags;
    uint32_t                 deviceMask;
} VkMemoryAllocateFlagsInfo;
VkResult vkCreateInstance(const VkInstanceCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkInstance* pInstance);
void vkDestroyInstance(VkInstance instance, const VkAllocationCallbacks* pAllocator);
VkResult vkEnumerateInstanceVersion(uint32_t* pApiVersion);
VkResult vkEnumeratePhysicalDevices(VkInstance instance, uint32_t* pPhysicalDeviceCount, VkPhysicalDevice* pPhysicalDevices);
VkResult vkEnumerateDeviceExtensionProperties(VkPhysicalDevice physicalDevice, const char* pLayerName, uint32_t* pPropertyCount, VkExtensionProperties* pProperties);
void vkGetPhysicalDeviceProperties2(VkPhysicalDevice physicalDevice, VkPhysicalDeviceProperties2* pProperties);
void vkGetPhysicalDeviceFeatures2(VkPhysicalDevice physicalDevice, VkPhysicalDeviceFeatures2* pFeatures);
void vkGetPhysicalDeviceQueueFamilyProperties(VkPhysicalDevice physicalDevice, uint32_t* pQueueFamilyPropertyCount, VkQueueFamilyProperties* pQueueFamilyProperties);
void vkGetPhysicalDeviceMemoryProperties2(VkPhysicalDevice physicalDevice, VkPhysicalDeviceMemoryProperties2* pMemoryProperties);
VkResult vkCreateDevice(VkPhysicalDevice physicalDevice, const VkDeviceCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkDevice* pDevice);
void vkDestroyDevice(VkDevice device, const VkAllocationCallbacks* pAllocator);
VkResult vkDeviceWaitIdle(VkDevice device);
void vkGetDeviceQueue(VkDevice device, uint32_t queueFamilyIndex, uint32_t queueIndex, VkQueue* pQueue);
VkResult vkCreateBuffer(VkDevice device, const VkBufferCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkBuffer* pBuffer);
void vkDestroyBuffer(VkDevice device, VkBuffer buffer, const VkAllocationCallbacks* pAllocator);
void vkGetBufferMemoryRequirements(VkDevice device, VkBuffer buffer, VkMemoryRequirements* pMemoryRequirements);
VkDeviceAddress vkGetBufferDeviceAddress(VkDevice device, const VkBufferDeviceAddressInfo* pInfo);
VkResult vkAllocateMemory(VkDevice device, const VkMemoryAllocateInfo* pAllocateInfo, const VkAllocationCallbacks* pAllocator, VkDeviceMemory* pMemory);
void vkFreeMemory(VkDevice device, VkDeviceMemory memory, const VkAllocationCallbacks* pAllocator);
VkResult vkBindBufferMemory(VkDevice device, VkBuffer buffer, VkDeviceMemory memory, VkDeviceSize memoryOffset);
VkResult vkMapMemory(VkDevice device, VkDeviceMemory memory, VkDeviceSize offset, VkDeviceSize size, VkMemoryMapFlags flags, void** ppData);
VkResult vkCreateShaderModule(VkDevice device, const VkShaderModuleCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkShaderModule* pShaderModule);
void vkDestroyShaderModule(VkDevice device, VkShaderModule shaderModule, const VkAllocationCallbacks* pAllocator);
VkResult vkCreatePipelineLayout(VkDevice device, const VkPipelineLayoutCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkPipelineLayout* pPipelineLayout);
void vkDestroyPipelineLayout(VkDevice device, VkPipelineLayout pipelineLayout, const VkAllocationCallbacks* pAllocator);
VkResult vkCreatePipelineCache(VkDevice device, const VkPipelineCacheCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkPipelineCache* pPipelineCache);
VkResult vkGetPipelineCacheData(VkDevice device, VkPipelineCache pipelineCache, size_t* pDataSize, void* pData);
void vkDestroyPipelineCache(VkDevice device, VkPipelineCache pipelineCache, const VkAllocationCallbacks* pAllocator);
VkResult vkCreateComputePipelines(VkDevice device, VkPipelineCache pipelineCache, uint32_t createInfoCount, const VkComputePipelineCreateInfo* pCreateInfos, const VkAllocationCallbacks* pAllocator, VkPipeline* pPipelines);
void vkDestroyPipeline(VkDevice device, VkPipeline pipeline, const VkAllocationCallbacks* pAllocator);
VkResult vkCreateCommandPool(VkDevice device, const VkCommandPoolCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkCommandPool* pCommandPool);
void vkDestroyCommandPool(VkDevice device, VkCommandPool commandPool, const VkAllocationCallbacks* pAllocator);
VkResult vkAllocateCommandBuffers(VkDevice device, const VkCommandBufferAllocateInfo* pAllocateInfo, VkCommandBuffer* pCommandBuffers);
void vkFreeCommandBuffers(VkDevice device, VkCommandPool commandPool, uint32_t commandBufferCount, const VkCommandBuffer* pCommandBuffers);
VkResult vkBeginCommandBuffer(VkCommandBuffer commandBuffer, const VkCommandBufferBeginInfo* pBeginInfo);
VkResult vkEndCommandBuffer(VkCommandBuffer commandBuffer);
void vkCmdBindPipeline(VkCommandBuffer commandBuffer, VkPipelineBindPoint pipelineBindPoint, VkPipeline pipeline);
void vkCmdPushConstants(VkCommandBuffer commandBuffer, VkPipelineLayout layout, VkShaderStageFlags stageFlags, uint32_t offset, uint32_t size, const void* pValues);
void vkCmdDispatch(VkCommandBuffer commandBuffer, uint32_t groupCountX, uint32_t groupCountY, uint32_t groupCountZ);
void vkCmdPipelineBarrier(VkCommandBuffer commandBuffer, VkPipelineStageFlags srcStageMask, VkPipelineStageFlags dstStageMask, VkDependencyFlags dependencyFlags, uint32_t memoryBarrierCount, const VkMemoryBarrier* pMemoryBarriers, uint32_t bufferMemoryBarrierCount, const VkBufferMemoryBarrier* pBufferMemoryBarriers, uint32_t imageMemoryBarrierCount, const VkImageMemoryBarrier* pImageMemoryBarriers);
void vkCmdCopyBuffer(VkCommandBuffer commandBuffer, VkBuffer srcBuffer, VkBuffer dstBuffer, uint32_t regionCount, const VkBufferCopy* pRegions);
void vkCmdFillBuffer(VkCommandBuffer commandBuffer, VkBuffer dstBuffer, VkDeviceSize dstOffset, VkDeviceSize size, uint32_t data);
VkResult vkCreateSemaphore(VkDevice device, const VkSemaphoreCreateInfo* pCreateInfo, const VkAllocationCallbacks* pAllocator, VkSemaphore* pSemaphore);
void vkDestroySemaphore(VkDevice device, VkSemaphore semaphore, const VkAllocationCallbacks* pAllocator);
VkResult vkWaitSemaphores(VkDevice device, const VkSemaphoreWaitInfo* pWaitInfo, uint64_t timeout);
VkResult vkGetSemaphoreCounterValue(VkDevice device, VkSemaphore semaphore, uint64_t* pValue);
VkResult vkQueueSubmit(VkQueue queue, uint32_t submitCount, const VkSubmitInfo* pSubmits, VkFence fence);
