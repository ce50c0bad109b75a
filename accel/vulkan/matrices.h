// Of VK_KHR_cooperative_matrix, revision 2, which is newer than the header of declarations.h.
// Copyright 2015-2023 The Khronos Group Inc.
// SPDX-License-Identifier: Apache-2.0
#define STRUCTURE_TYPE_VkPhysicalDeviceCooperativeMatrixFeaturesKHR 1000506000
#define STRUCTURE_TYPE_VkCooperativeMatrixPropertiesKHR 1000506001
#define VK_COMPONENT_TYPE_SINT8_KHR 3
#define VK_COMPONENT_TYPE_SINT32_KHR 5
#define VK_SCOPE_SUBGROUP_KHR 3
#define VK_SUBGROUP_FEATURE_SHUFFLE_BIT 0x00000010
typedef struct VkPhysicalDeviceCooperativeMatrixFeaturesKHR {
    VkStructureType sType;
    void *pNext;
    VkBool32 cooperativeMatrix;
    VkBool32 cooperativeMatrixRobustBufferAccess;
} VkPhysicalDeviceCooperativeMatrixFeaturesKHR;
typedef struct VkCooperativeMatrixPropertiesKHR {
    VkStructureType sType;
    void *pNext;
    uint32_t MSize;
    uint32_t NSize;
    uint32_t KSize;
    int32_t AType;
    int32_t BType;
    int32_t CType;
    int32_t ResultType;
    VkBool32 saturatingAccumulation;
    int32_t scope;
} VkCooperativeMatrixPropertiesKHR;
typedef VkResult (*PFN_GetCooperativeMatrixProperties)(VkPhysicalDevice physicalDevice,
    uint32_t *pPropertyCount, VkCooperativeMatrixPropertiesKHR *pProperties);
void *vkGetInstanceProcAddr(VkInstance instance, const char *pName);
